"""What runs inside one swapped layer: a call and its masks, the computation, the child module and its options."""
