"""The process that reads the samples: numpy and the standard library only, so that it starts in a moment."""
