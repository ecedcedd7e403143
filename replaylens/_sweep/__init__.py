"""Graph + recorded values + many small changes -> what each change makes of the output, all at once."""
