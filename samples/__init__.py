"""Sample video and sample models: everything runs with no download."""
