"""Steps on the device: shapes, programs, sampling, weights and adapters."""
