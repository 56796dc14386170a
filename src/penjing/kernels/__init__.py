"""Floor 1: operations with more than one implementation. Plain torch is the reference beside each."""
