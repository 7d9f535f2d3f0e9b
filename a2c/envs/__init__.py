"""Environments: Atari games and every other Gymnasium id with discrete actions. Nothing here imports torch.

The contract of a vector environment (`MonitoredVectorEnv`), whatever the backend:

========== ======================= ==========================================================
name       shape, dtype            meaning
========== ======================= ==========================================================
obs        [N, K, S, S] uint8      K = frame_stack, newest frame last, S = frame_size; frames before the start of an
                                   episode are zeros (other ids: the environment's own observation)
rewards    [N] float32             raw points of this step, not clipped
terminated [N] bool                the episode ended by the rules of the game (or, with `terminal_on_life_loss`, a life
                                   was lost)
truncated  [N] bool                the episode was cut off, at `max_episode_frames` (other ids: at the environment's own
                                   limit); where a life was lost in the same step, `terminated` is set too (not by
                                   native, which reports the next episode's lives)
info       "final_obs"             {row: the true last observation} of exactly the rows that ended
info       "episodes"              list of `Episode`, one per episode that ended in this step; a lost life ends none
========== ======================= ==========================================================

The next step may overwrite `obs`: `async` reuses its buffer (gymnasium's `copy=False`).

Autoreset is SAME_STEP: where an episode ended, `obs` is the first observation of the next one, so no transition leads
from one episode to another. A lost life is terminal for the learner and never resets the environment.
"""
