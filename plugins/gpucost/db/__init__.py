"""Where is it written down? gpucost's own database: tables, engine and migrations."""
