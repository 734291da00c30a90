"""A shop, as the tests start it. The environment says where its locks and its data are."""

import json
import os
from pathlib import Path

SECRET_KEY = "tests"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["interlock.contrib.django", "shop"]
MIDDLEWARE = ["interlock.contrib.django.middleware.LocksMiddleware"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DATABASES = json.loads(os.environ["SHOP_DATABASES"])
for each in DATABASES.values():
    if "sqlite3" in each["ENGINE"]:
        each.setdefault("TEST", {"NAME": str(Path(each["NAME"]).with_suffix(".test"))})
CACHES = json.loads(
    os.environ.get("SHOP_CACHES", '{"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}')
)
INTERLOCK = json.loads(os.environ.get("SHOP_INTERLOCK", '{"default": {}}'))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"interlock": {"handlers": ["stderr"]}, "django.request": {"handlers": [], "propagate": False}},
}
