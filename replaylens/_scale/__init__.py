"""Work that goes to the processes of an executor that the user has."""
