"""`@single`, and `manage.py locks`."""

import io
import json
import tempfile
from pathlib import Path
from unittest import mock

from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand
from django.test import SimpleTestCase, override_settings

from interlock import ConfigError, LeaseLost
from interlock.contrib.django import locks, single
from shop.tests.base import Other


def call(*words, status=0, **options):
    out = io.StringIO()
    try:
        call_command(*words, stdout=out, **options)
    except SystemExit as ended:
        assert ended.code == status, (ended.code, out.getvalue())
    else:
        assert status == 0, out.getvalue()
    return out.getvalue()


class Single(Other, SimpleTestCase):
    def test_a_second_run_is_skipped_with_a_line(self):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            self.assertIn("done", call("nightly", str(report)))
            self.assertRegex(call("nightly", str(report)), r"^skipped: \S+ ran command:nightly from .* to ")
            self.assertEqual(call("nightly", str(report), verbosity=0), "")
            self.assertEqual(len(report.read_text().splitlines()), 1)
        self.assertTrue(self.other.once("command:nightly", at_most=86_400, at_least=20).forget())

    def test_the_name_may_be_made_of_options(self):
        self.assertEqual(call("load"), "eu\n")
        self.assertEqual(call("load"), "eu\n")  # at_least is 0
        with self.other.lock("kept"):
            pass
        run = self.other.once("load:us", at_most=60)

        def meanwhile(_):
            self.assertRegex(call("load", region="us"), "^skipped: .* runs load:us since ")
            self.assertEqual(call("load"), "eu\n")

        self.assertTrue(run.run(meanwhile))

    def test_an_error_of_the_command_is_its_own(self):
        with self.assertRaises(LookupError):
            call_command("load", fail=True)
        self.assertEqual(call("load"), "eu\n")

    def test_without_a_server_it_does_not_run(self):
        with override_settings(INTERLOCK={"default": {"URL": "redis://localhost:1/0"}}):
            with self.assertRaisesRegex(CommandError, "^did not run: .*localhost:1") as raised:
                call_command("load")
            self.assertEqual(raised.exception.returncode, 69)

    def test_bad_input(self):
        with self.assertRaisesRegex(ConfigError, "decorates the class Command"):
            single(lambda: None)

        @single(name="load:{regoin}")
        class Command(BaseCommand):
            def handle(self, *args, **options):
                pass

        with self.assertRaisesRegex(ConfigError, "lacks the argument 'regoin'"):
            call_command(Command())


class Locks(Other, SimpleTestCase):
    def test_ls_show_revoke(self):
        with self.assertRaises(LeaseLost), self.other.lock("cart:7") as lease:
            view = json.loads(call("locks", "show", "cart:7", "--json"))
            self.assertEqual(view["holders"][0]["token"], lease.token)
            self.assertIn("cart:7", call("locks", "show", "cart:7"))
            said = call("locks", "revoke", "cart:7", "--reason", "a test", "--force", "--grace", "0", "-y")
            self.assertIn("cart:7 was taken from", said)
            self.assertTrue(lease.ended.wait(20))
        self.assertIsInstance(json.loads(call("locks", "ls", "--json")), list)
        self.assertIn("Usage: manage.py locks ls", call("locks", "ls", "--help"))

    def test_an_alias_has_its_server_and_prefix(self):
        url = locks["default"]._address.display_url
        cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": self.url_of(url)}
        setting = {"default": {"URL": "redis://localhost:1/0"}, "other": {"CACHE": "locks", "PREFIX": "x:"}}
        with override_settings(INTERLOCK=setting, CACHES={"default": cache, "locks": cache}):
            with locks["other"].lock("cart:7"):
                self.assertIn("held", call("locks", "--alias", "other", "show", "cart:7"))
                call("locks", "--alias", "other", "show", "cart:8", status=1)
                call("locks", "--alias", "other", "show", "cart:7", "--prefix", "y:", status=1)

    def url_of(self, display):
        from django.conf import settings

        return settings.INTERLOCK["default"]["URL"]

    def test_errors_are_lines_with_a_status(self):
        for words, status, said in (
            (("ls", "--nosuch"), 64, "No such option"),
            (("show",), 64, "Missing argument"),
            (("revoke", "a"), 64, "--reason"),
            (("--alias", "nosuch", "ls"), 64, "no alias 'nosuch'"),
            (("ls", "--url", "redis://localhost:1/0"), 69, "localhost:1"),
        ):
            with self.assertRaisesRegex(CommandError, said) as raised:
                call_command("locks", *words)
            self.assertEqual(raised.exception.returncode, status)

    def test_without_typer(self):
        with mock.patch.dict("sys.modules", {"typer": None}):
            with self.assertRaisesRegex(CommandError, "pip install typer rich") as raised:
                call_command("locks", "ls")
            self.assertEqual(raised.exception.returncode, 69)
