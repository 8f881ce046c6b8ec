"""Whether a machine is well: how it is set up, how fast it is beside its peak, how exactly it computes."""
