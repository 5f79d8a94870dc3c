"""One swapped layer: its variants and fits, what it computes, and the names under which a user asks for it."""
