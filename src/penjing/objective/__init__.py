"""Floor 3: what is to be made small. An objective returns sums; the loop divides once, by the global weight."""
