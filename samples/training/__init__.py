"""How the sample models' weights are made; data and half-done work stay outside the repository."""
