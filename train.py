"""Train an advantage actor-critic on an Atari game: `python train.py --help`."""

from a2c.cli.commands import train

if __name__ == "__main__":
    raise SystemExit(train())
