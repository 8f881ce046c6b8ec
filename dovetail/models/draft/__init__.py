"""Draft models: small models that propose tokens for a target to verify."""
