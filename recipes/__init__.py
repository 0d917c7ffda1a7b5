"""Plain Lightning recipes to copy; their code does not depend on the number of devices."""
