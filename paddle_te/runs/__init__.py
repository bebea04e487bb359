"""What a run is and leaves: its layout, its checkpoints, how they are saved, its curves. Knows no Paddle."""
