"""Jobs: a store, a supervisor and the backends where commands and trainings run. Needs no jax."""
