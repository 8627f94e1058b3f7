"""Plain Flax models that know nothing of sharding; each has `PRESETS` and `build(config)`."""
