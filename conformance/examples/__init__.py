"""Two small devices of our own: to test the suite with, and to start a backend from."""
