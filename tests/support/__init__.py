"""What tests share: the single-device oracle, saved states, rows of grids."""
