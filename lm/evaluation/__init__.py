"""What a finished model is worth: measures that do not depend on how it was trained. No Lightning."""
