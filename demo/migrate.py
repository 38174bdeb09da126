"""`python -m demo.migrate URL`: bring gpucost's own database to its present schema."""

import sys

from gpucost.db.engine import Database

if __name__ == "__main__":
    database = Database(sys.argv[1])
    database.migrate()
    database.close()
