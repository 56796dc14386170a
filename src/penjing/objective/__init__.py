"""Floor 3: training objectives. An objective returns sums; the loop divides once, by the global weight."""
