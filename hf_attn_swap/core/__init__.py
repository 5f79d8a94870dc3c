"""What runs inside one layer: the call and its masks, the computation, the child module, its parts."""
