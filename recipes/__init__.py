"""Plain Lightning recipes to copy: nothing in them knows how many devices they will run on."""
