"""One vLLM server, two traffic classes: start it, talk to it, measure it."""
