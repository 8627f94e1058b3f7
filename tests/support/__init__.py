"""What tests share: the single-device oracle, saved states, pairwise rows."""
