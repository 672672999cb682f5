"""What guarding costs, as ratios measured in one run on the same servers (`make bench`)."""
