"""The settings of a run: presets, rules, the dataclass, what `auto` resolves to. No torch, numpy or gymnasium."""
