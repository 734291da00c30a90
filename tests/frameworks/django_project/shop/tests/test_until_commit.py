"""A lock is held until the commit, or the rollback, or whatever else ends the transaction."""

import gc
import threading
import unittest

from django.db import (
    DEFAULT_DB_ALIAS,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
    transaction,
)
from django.test import TestCase, TransactionTestCase

from interlock import Deadlock, LeaseLost
from interlock.contrib.django import locks, name_of
from shop.models import Note, Order
from shop.tests.base import Other, wait_until


class Fault(Exception):
    pass


class Steps(Other):
    """What holds in a transaction and in a TestCase alike."""

    def setUp(self):
        super().setUp()
        self.order = Order.objects.create()
        self.name = name_of(self.order)

    def lock(self, **options):
        return locks.lock(self.order, until_commit=True, **options)

    def test_held_until_the_commit(self):
        with transaction.atomic():
            with self.lock() as lease:
                self.order.save()
            self.assert_held(self.name)
            lease.ensure()
        self.assert_free(self.name)
        self.assertFalse(lease.lost)

    def test_held_until_the_rollback(self):
        with self.assertRaises(Fault), transaction.atomic():
            with self.lock():
                Order.objects.create(state="no")
            self.assert_held(self.name)
            raise Fault
        self.assert_free(self.name)
        self.assertFalse(Order.objects.filter(state="no").exists())

    def test_an_error_in_the_with_ends_it_with_the_transaction(self):
        with self.assertRaises(Fault), transaction.atomic(), self.lock():
            raise Fault
        self.assert_free(self.name)

    def test_a_savepoint_ends_nothing(self):
        with transaction.atomic():
            with self.assertRaises(Fault), transaction.atomic(), self.lock():
                raise Fault
            self.assert_held(self.name)
            with transaction.atomic():
                pass
            sid = transaction.savepoint()
            transaction.savepoint_rollback(sid)
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_an_inner_block_is_no_end(self):
        with transaction.atomic():
            with transaction.atomic(), transaction.atomic(savepoint=False), self.lock():
                pass
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_a_durable_block(self):
        with transaction.atomic(durable=True), self.lock():
            pass
        self.assert_free(self.name)

    def test_without_a_transaction_it_ends_with_the_with(self):
        with self.lock():
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_around_a_transaction_it_ends_with_the_with(self):
        with self.lock():
            with transaction.atomic():
                self.order.save()
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_a_transaction_may_lock_twice(self):
        with transaction.atomic():
            with self.lock() as first:
                pass
            with self.lock() as second, locks.rlock(self.order) as third:
                self.assertEqual((first.fence, third.fence), (second.fence, second.fence))
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_two_locks(self):
        with transaction.atomic():
            with self.lock(), locks.lock("another", until_commit=True):
                pass
            self.assert_held(self.name)
            self.assert_held("another")
        self.assert_free(self.name)
        self.assert_free("another")

    def test_a_plain_lock_in_the_same_transaction_is_a_deadlock(self):
        with self.assertRaises(Deadlock), transaction.atomic():
            with self.lock():
                pass
            with locks.lock(self.order, timeout=20):
                self.fail("the lock was acquired twice")
        self.assert_free(self.name)

    def test_the_thread_is_inside_until_the_commit(self):
        with transaction.atomic():
            with self.lock() as lease:
                pass
            self.assertIs(locks.assert_held(self.order), lease)
        with self.assertRaises(RuntimeError):
            locks.assert_held(self.order)

    def test_as_a_decorator(self):
        @self.lock()
        def work():
            self.assert_held(self.name)

        with transaction.atomic():
            work()
            work()
            self.assert_held(self.name)
        self.assert_free(self.name)
        work()
        self.assert_free(self.name)

    def test_a_commit_without_the_lease_is_refused(self):
        called = []
        with self.assertRaises(LeaseLost) as raised, transaction.atomic():
            transaction.on_commit(lambda: called.append(1))
            with self.lock() as lease:
                Order.objects.create(state="no")
            self.take(self.name)
            wait_until(lambda: lease.lost)
        self.assertIn("rolled back", raised.exception.__notes__[0])
        self.assertFalse(Order.objects.filter(state="no").exists())
        self.assertEqual(called, [])
        self.assert_free(self.name)
        with transaction.atomic(), self.lock():  # and the connection is as good as before
            Order.objects.create(state="yes")
        self.assertTrue(Order.objects.filter(state="yes").exists())

    def test_a_commit_inside_of_a_lost_lease_is_refused(self):
        with self.assertRaises(LeaseLost), self.lock() as lease, transaction.atomic():
            Order.objects.create(state="no")
            self.take(self.name)
            wait_until(lambda: lease.lost)
        self.assertFalse(Order.objects.filter(state="no").exists())
        self.assert_free(self.name)

    def test_a_lost_lease_is_raised_at_the_end_of_the_with(self):
        with self.assertRaises(LeaseLost), transaction.atomic():
            with self.lock() as lease:
                self.take(self.name)
                wait_until(lambda: lease.lost)
            self.fail("the transaction went on")
        self.assert_free(self.name)

    def test_an_error_is_not_replaced_by_a_lost_lease(self):
        with self.assertRaises(Fault), transaction.atomic(), self.lock() as lease:
            self.take(self.name)
            wait_until(lambda: lease.lost)
            raise Fault
        self.assert_free(self.name)

    def test_renewed_until_the_commit(self):
        with transaction.atomic():
            with self.lock(ttl=0.5) as lease:
                began = lease.remaining()
            end = threading.Event()
            end.wait(3 * began)
            lease.ensure()
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_a_name_and_a_database(self):
        with transaction.atomic(), locks.lock("name", until_commit=True, using=DEFAULT_DB_ALIAS):
            pass
        self.assert_free("name")

    def test_set_rollback(self):
        with transaction.atomic(), self.lock():
            transaction.set_rollback(True)
        self.assert_free(self.name)


class InATestCase(Steps, TestCase):
    """The outermost block of the tested code counts, though nothing is committed."""

    def test_on_commit_is_captured(self):
        called = []
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            with self.lock():
                pass
            transaction.on_commit(lambda: called.append(1))
        self.assertEqual(called, [1])
        self.assert_free(self.name)

    def test_a_block_without_a_savepoint_ends_with_the_test_at_the_latest(self):
        with transaction.atomic(savepoint=False), self.lock():
            pass
        with self.lock():  # the thread that holds it may have it again
            pass

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        assert not connection._interlock_transactions.holds


class InATransaction(Steps, TransactionTestCase):
    """The real thing."""

    def test_hooks_run_after_the_release_and_may_fail(self):
        with self.assertRaises(Fault), transaction.atomic():
            with self.lock():
                pass

            def hook():
                self.assert_free(self.name)
                raise Fault

            transaction.on_commit(hook)
        self.assert_free(self.name)

    def test_a_commit_that_fails(self):
        with self.assertRaises(IntegrityError), transaction.atomic():
            with self.lock():
                Note.objects.create(worker=1, order_id=987_654)  # the constraint is looked at when it is committed
            self.assert_held(self.name)
        self.assert_free(self.name)

    def test_a_connection_closed_in_the_middle(self):
        with self.assertRaises(Exception), transaction.atomic():  # noqa: B017 (each version has another)
            with self.lock():
                Order.objects.create(state="no")
            connection.close()
            self.assert_free(self.name)
            Order.objects.create(state="no")
        self.assert_free(self.name)
        self.assertFalse(Order.objects.filter(state="no").exists())

    def test_a_connection_closed_in_the_with(self):
        with transaction.atomic():
            with self.lock():
                connection.close()
                self.assert_held(self.name)
            self.assert_free(self.name)

    @unittest.skipUnless(connection.vendor == "postgresql", "a server that can be told to end a connection")
    def test_a_database_that_goes_away(self):
        with self.assertRaises(OperationalError), transaction.atomic():
            with self.lock():
                Order.objects.create(state="no")
            killer = connection.copy()
            with connection.cursor() as cursor, killer.cursor() as other:
                cursor.execute("SELECT pg_backend_pid()")
                other.execute("SELECT pg_terminate_backend(%s)", cursor.fetchone())
            killer.close()
            Order.objects.create(state="no")
        self.assert_free(self.name)
        connection.close()
        self.assertFalse(Order.objects.filter(state="no").exists())

    def test_manual_transactions(self):
        for end in (transaction.commit, transaction.rollback, connection.close):
            transaction.set_autocommit(False)
            try:
                with self.lock():
                    self.order.save()
                self.assert_held(self.name)
                with transaction.atomic():
                    pass
                self.assert_held(self.name)
                end()
                self.assert_free(self.name)
            finally:
                transaction.rollback()
                transaction.set_autocommit(True)

    def test_the_end_of_a_manual_transaction(self):
        transaction.set_autocommit(False)
        with self.lock():
            pass
        self.assert_held(self.name)
        transaction.set_autocommit(True)
        self.assert_free(self.name)

    def test_a_manual_commit_without_the_lease_is_refused(self):
        transaction.set_autocommit(False)
        try:
            with self.lock() as lease:
                Order.objects.create(state="no")
            self.take(self.name)
            wait_until(lambda: lease.lost)
            with self.assertRaises(LeaseLost):
                transaction.commit()
        finally:
            transaction.set_autocommit(True)
        self.assertFalse(Order.objects.filter(state="no").exists())

    def lose(self, lease):
        self.take(self.name)
        wait_until(lambda: lease.lost)

    def is_committed(self):
        return Order.objects.filter(state="no").exists()

    def test_autocommit_that_is_turned_on_without_the_lease_commits_nothing(self):
        for turn_on in (transaction.set_autocommit, connection.set_autocommit):
            transaction.set_autocommit(False)
            with self.lock() as lease:
                Order.objects.create(state="no")
            self.lose(lease)
            with self.assertRaises(LeaseLost) as raised:
                turn_on(True)
            self.assertIn("rolled back", raised.exception.__notes__[0])
            self.assertTrue(transaction.get_autocommit(), "what else was asked is done")
            self.assertFalse(self.is_committed())
            self.assert_free(self.name)

    def test_autocommit_that_is_turned_on_inside_of_a_lost_lease_commits_nothing(self):
        transaction.set_autocommit(False)
        with self.assertRaises(LeaseLost), self.lock() as lease:
            Order.objects.create(state="no")
            self.lose(lease)
            transaction.set_autocommit(True)
        self.assertTrue(transaction.get_autocommit())
        self.assertFalse(self.is_committed())
        self.assert_free(self.name)

    def test_autocommit_that_is_turned_on_with_the_lease(self):
        transaction.set_autocommit(False)
        with self.lock():
            Order.objects.create(state="yes")
        if connection.vendor == "postgresql":  # its drivers refuse that in the middle of a transaction
            with self.assertRaises(ProgrammingError):
                transaction.set_autocommit(True)
            self.assert_held(self.name)
            transaction.commit()
        transaction.set_autocommit(True)
        self.assertTrue(Order.objects.filter(state="yes").exists())
        self.assert_free(self.name)

    def test_the_second_manual_transaction_is_looked_at_as_the_first(self):
        transaction.set_autocommit(False)
        with self.assertRaises(LeaseLost), self.lock() as lease:
            Order.objects.create(state="yes")
            transaction.commit()
            Order.objects.create(state="no")
            self.lose(lease)
            connection.set_autocommit(True)
        self.assertFalse(self.is_committed())
        self.assertTrue(Order.objects.filter(state="yes").exists())

    def test_a_savepoint_of_a_manual_transaction_commits_nothing_without_the_lease(self):
        """If a transaction of SQLite has begun with a savepoint, the release of that savepoint commits it."""
        transaction.set_autocommit(False)
        try:
            with self.lock() as lease:
                pass
            self.lose(lease)
            with transaction.atomic(), transaction.atomic():
                Order.objects.create(state="no")
            with self.assertRaises(Fault), transaction.atomic():
                raise Fault
            sid = transaction.savepoint()
            Order.objects.create(state="no")
            transaction.savepoint_commit(sid)
            with self.assertRaises(LeaseLost):
                connection.commit()
        finally:
            transaction.set_autocommit(True)
        self.assertFalse(self.is_committed())

    def test_a_refusal_that_is_interrupted_commits_nothing(self):
        """`atomic` turns autocommit on in its `finally`, which commits on SQLite."""
        rollback = connection.rollback

        def interrupted():
            connection.rollback = rollback
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt), transaction.atomic():
            with self.lock() as lease:
                Order.objects.create(state="no")
            self.lose(lease)
            connection.rollback = interrupted
        self.assertTrue(transaction.get_autocommit())
        self.assertFalse(self.is_committed())
        self.assert_free(self.name)

    def test_a_loss_after_the_commit_is_not_raised_by_the_transaction(self):
        commit, reached = connection.commit, []

        def then_lose():
            commit()
            connection.commit = commit
            self.lose(lease)

        with self.assertRaises(LeaseLost), self.lock() as lease:
            with transaction.atomic():
                Order.objects.create(state="yes")
                connection.commit = then_lose
            reached.append(1)
        self.assertEqual(reached, [1])
        self.assertTrue(Order.objects.filter(state="yes").exists())

    def test_a_connection_that_is_closed_commits_nothing_of_a_manual_transaction(self):
        transaction.set_autocommit(False)
        with self.assertRaises(LeaseLost), self.lock() as lease:
            Order.objects.create(state="no")
            connection.close()
            self.lose(lease)
            self.assertFalse(self.is_committed())  # by a new connection, which is in autocommit mode
            self.assertTrue(transaction.get_autocommit())

    def test_a_hook_that_fails_when_autocommit_is_turned_on_keeps_no_lease(self):
        def hook():
            raise Fault

        transaction.set_autocommit(False)
        with transaction.atomic():
            transaction.on_commit(hook)
        transaction.commit()
        with self.lock():
            pass
        with self.assertRaises(Fault):
            transaction.set_autocommit(True)
        self.assert_free(self.name)

    def test_what_goes_past_django_goes_past_the_look(self):
        """As the page says."""
        transaction.set_autocommit(False)
        try:
            with self.lock() as lease:
                Order.objects.create(state="no")
            self.lose(lease)
            with connection.cursor() as cursor:
                cursor.execute("COMMIT")
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
        self.assertTrue(self.is_committed())

    def test_a_thread_that_ends_in_the_middle(self):
        def work():
            transaction.atomic().__enter__()
            with self.lock():
                pass
            self.assert_held(self.name)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        gc.collect()
        self.assert_free(self.name, within=20)

    def test_a_generator_that_another_thread_ends(self):
        def rows():
            with self.lock():
                yield 1
                yield 2

        generator = rows()
        next(generator)
        thread = threading.Thread(target=lambda: list(generator))
        thread.start()
        thread.join(20)
        self.assert_free(self.name)

    def test_one_lock_of_several_threads(self):
        lock, order = self.lock(timeout=20), []

        def work():
            with lock:
                order.append("begin")
                order.append("end")

        threads = [threading.Thread(target=work) for _ in range(4)]
        with lock:
            order.append("begin")
            for thread in threads:
                thread.start()
            order.append("end")
        for thread in threads:
            thread.join(20)
        self.assertEqual(order, ["begin", "end"] * 5)
        self.assert_free(self.name)

    def test_another_client_waits_for_the_commit_and_reads_it(self):
        seen = []

        def work():
            try:
                with transaction.atomic(), self.other.lock(self.name, timeout=20):
                    seen.append(Order.objects.get(pk=self.order.pk).state)
            finally:
                connections.close_all()

        with transaction.atomic(), self.lock():
            self.order.state = "paid"
            self.order.save()
            thread = threading.Thread(target=work)
            thread.start()
            wait_until(lambda: self.other.lock(self.name).inspect().waiting)
        thread.join(20)
        self.assertEqual(seen, ["paid"])


class OtherDatabase(Other, TransactionTestCase):
    databases = {"default", "other"}

    def test_the_transaction_of_the_database_of_the_instance_counts(self):
        order = Order.objects.using("other").create()
        with transaction.atomic():
            with transaction.atomic(using="other"):
                with locks.lock(order, until_commit=True):
                    pass
                self.assert_held(name_of(order))
            self.assert_free(name_of(order))
            with locks.lock(order, until_commit=True, using="default"):
                pass
            self.assert_held(name_of(order))
        self.assert_free(name_of(order))

    def test_only_the_commit_in_the_database_of_the_lease_is_refused(self):
        order = Order.objects.create()
        with self.assertRaises(LeaseLost), transaction.atomic():
            with transaction.atomic(using="other"):
                with locks.lock(order, until_commit=True) as lease:
                    Order.objects.create(state="no")
                    Order.objects.using("other").create(state="other")
                self.take(name_of(order))
                wait_until(lambda: lease.lost)
        self.assertFalse(Order.objects.filter(state="no").exists())
        self.assertTrue(Order.objects.using("other").filter(state="other").exists())
