"""How many of the most probable tokens a device gives."""

MOST_ON_DEVICE = 1024
