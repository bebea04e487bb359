"""Model families; each is a folder with its decoder layer, the switch and the names of its weights."""
