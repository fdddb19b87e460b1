"""Long runs against everything real, after which every number must add up."""
