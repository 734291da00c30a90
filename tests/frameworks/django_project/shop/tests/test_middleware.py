"""Busy is 423, a lost lease and a server that is away are 503; the other errors are Django's."""

import logging

from asgiref.sync import async_to_sync
from django.test import AsyncClient, Client, RequestFactory, TestCase, TransactionTestCase, override_settings

from interlock import LeaseLost
from interlock.contrib.django import locks
from interlock.contrib.django.middleware import LocksMiddleware
from shop.models import Order
from shop.tests.base import Other


class Middleware(Other, TestCase):
    def test_busy(self):
        with self.other.lock("cart:7"):
            for path in ("/busy/cart:7", "/abusy/cart:7"):
                answer = Client().get(path)
                problem = answer.json()
                self.assertEqual((answer.status_code, answer.reason_phrase), (423, "Locked"))
                self.assertEqual((answer["Content-Type"], answer["Retry-After"]), ("application/problem+json", "1"))
                self.assertEqual((problem["lock"], problem["detail"]), ("cart:7", "'cart:7' is busy. Try again later"))
        self.assertEqual(Client().get("/busy/cart:7").content, b"mine")

    def test_under_asgi(self):
        with self.other.lock("cart:7"):
            for path in ("/busy/cart:7", "/abusy/cart:7"):
                self.assertEqual(async_to_sync(AsyncClient().get)(path).status_code, 423)

    def test_busy_as_a_conflict(self):
        class Conflict(LocksMiddleware):
            busy = 409

        with self.other.lock("cart:7"), self.assertRaises(TimeoutError) as raised:
            locks.lock("cart:7", timeout=0).acquire()
        request = RequestFactory().get("/")
        answer = Conflict(lambda _: None).process_exception(request, raised.exception)
        self.assertEqual(answer.status_code, 409)

    def test_lost(self):
        lost = LeaseLost("the lease of web-3")
        answer = LocksMiddleware(lambda _: None).process_exception(RequestFactory().get("/"), lost)
        self.assertEqual(answer.status_code, 503)
        self.assertFalse(answer.has_header("Retry-After"))
        self.assertNotIn(b"web-3", answer.content)

    def test_away_is_said_once(self):
        with override_settings(INTERLOCK={"default": {"URL": "redis://localhost:1/0"}}):
            client = Client()
            with self.assertLogs("interlock", logging.WARNING) as logged:
                answers = [client.get("/busy/a") for _ in range(3)]
            self.assertEqual([each.status_code for each in answers], [503] * 3)
            self.assertTrue(all(each["Retry-After"] for each in answers))
            self.assertNotIn(b"localhost", answers[0].content)
            said = [each for each in logged.output if "answered with 503" in each]
            self.assertEqual(len(said), 1, logged.output)
            self.assertIn("localhost:1", said[0])

    def test_other_errors_are_those_of_the_program(self):
        with self.assertRaises(LookupError):
            Client().get("/broken")
        with override_settings(INTERLOCK={"default": {"URL": "redis://localhost:1/0"}}):
            client = Client(raise_request_exception=False)
            self.assertEqual(client.get("/broken").status_code, 500)


class AtomicRequests(Other, TransactionTestCase):
    def test_the_commit_of_a_request_ends_the_lease_and_is_refused_without_it(self):
        from django.db import connection

        order = Order.objects.create()
        connection.settings_dict["ATOMIC_REQUESTS"] = True
        self.addCleanup(connection.settings_dict.update, ATOMIC_REQUESTS=False)
        self.assertEqual(Client().get(f"/buy/{order.pk}").json()["stock"], 1)
        self.assert_free(f"shop.order:{order.pk}")
        answer = Client(raise_request_exception=False).get(f"/lose/{order.pk}")
        self.assertEqual(answer.status_code, 503)
        order.refresh_from_db()
        self.assertEqual(order.stock, 1)
        self.assert_free(f"shop.order:{order.pk}")
