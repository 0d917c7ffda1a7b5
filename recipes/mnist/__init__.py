"""A small convolutional network on handwritten digits."""
