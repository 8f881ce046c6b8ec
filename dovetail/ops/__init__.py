"""Operations: a readable, exact reference each, and kernels with the same signatures; dispatch chooses."""
