"""Ground that every room stands on: specs, meshes, errors, recipes, chips; imports no other room."""
