"""`book`: all lessons with their saved outputs as a site of static pages, to be read without installing anything."""
