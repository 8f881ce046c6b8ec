"""Plan training, serving and RL from declared weights: memory, time and cost, before anything is allocated."""
