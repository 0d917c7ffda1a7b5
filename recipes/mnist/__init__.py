"""Recipe: a small convolutional network on handwritten digits."""
