"""anyfp8 behind other libraries' names; nothing in the library imports these modules."""
