"""The data of one call of a swapped layer, its masks, and the options of a variant."""
