"""From camera frames to stored descriptions, and the HTTP service around them."""
