"""What a run does while it trains, whichever host's Trainer runs it."""
