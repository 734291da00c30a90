"""Start the shop: python start.py [port]. Its data is in shop.sqlite3 beside this file, or where $SHOP_DATA says."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    port = sys.argv[1] if len(sys.argv) > 1 else "8000"
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    from django.contrib.auth import get_user_model
    from shop.models import Seats

    if not get_user_model().objects.filter(username="admin").exists():
        get_user_model().objects.create_superuser("admin", password="admin")
    Seats.objects.get_or_create(pk=1, defaults={"show": "The Tempest", "left": 10})
    os.execv(sys.executable, [sys.executable, "manage.py", "runserver", f"127.0.0.1:{port}"])


if __name__ == "__main__":
    main()
