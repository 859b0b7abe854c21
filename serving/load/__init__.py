"""Open-loop mixed image-and-chat load on one server."""
