"""Memory of a device: the plan, in integers."""
