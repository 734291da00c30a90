"""Rows that refuse the writes of older holders."""

import contextlib
import copy
import pickle
import threading

from asgiref.sync import async_to_sync
from django.db import DatabaseError, connection, connections, transaction
from django.test import TestCase, TransactionTestCase

from interlock import ConfigError, LeaseLost
from interlock.contrib.django import alocks, locks
from interlock.fence import StaleFence
from interlock.fence.django import create_table, guard, update
from shop.models import Order, Paper


class Mark:
    def __init__(self, fence, name="paper"):
        self.name, self.fence = name, fence


OLD, NEW = Mark(1_700_000_000_000_000), Mark(1_700_000_000_000_001)


class Rows(TestCase):
    def setUp(self):
        self.paper = Paper.objects.create(words="first")

    def words(self):
        return Paper.objects.get(pk=self.paper.pk).words

    def refuses(self):
        class Refused:
            def __enter__(self):
                self.atomic = transaction.atomic()
                self.atomic.__enter__()

            def __exit__(self, kind, error, trace):
                self.atomic.__exit__(kind, error, trace)
                assert isinstance(error, StaleFence), error
                assert isinstance(error, LeaseLost)
                assert "acquire the lock again" in str(error)
                return True

        return Refused()

    def claimed(self, lease):
        paper = Paper.objects.get(pk=self.paper.pk)
        paper.claim(lease)
        return paper

    def test_older_holders_are_refused_and_the_same_one_never(self):
        old = self.claimed(OLD)
        for words in ("one", "two"):
            old.words = words
            old.save()
        new = self.claimed(NEW)
        self.assertEqual(new.words, "two")
        with self.refuses():
            old.words = "late"
            old.save()
        with self.refuses():
            old.save(update_fields=["words"])
        with self.refuses():
            old.delete()
        with self.refuses():
            self.claimed(OLD)
        new.words = "three"
        new.save()
        self.assertEqual(self.words(), "three")
        new.delete()

    def test_a_claim_reads_anew(self):
        Paper.objects.filter(pk=self.paper.pk).update(words="changed")
        self.paper.claim(OLD)
        self.assertEqual(self.paper.words, "changed")

    def test_who_was_read_before_a_claim_is_refused_without_a_lease(self):
        late = Paper.objects.get(pk=self.paper.pk)
        self.claimed(NEW)
        with self.refuses():
            late.save()
        fresh = Paper.objects.get(pk=self.paper.pk)
        fresh.words = "by somebody without a lease"
        fresh.save()
        self.assertEqual(self.words(), "by somebody without a lease")

    def test_the_lease_of_its_name_counts_though_it_was_read_again(self):
        with locks.lock(self.paper) as lease:
            self.claimed(Mark(lease.fence + 1))
            with self.refuses():
                again = Paper.objects.get(pk=self.paper.pk)
                again.words = "late"
                again.save()
        with locks.multi(locks.lock("a"), locks.lock(self.paper)):
            again = Paper.objects.get(pk=self.paper.pk)
            again.save()
        self.assertGreater(again.fence, lease.fence)

    def test_a_row_that_is_gone_does_not_come_back(self):
        paper = self.claimed(OLD)
        Paper.objects.get(pk=paper.pk).delete()
        with self.assertRaises(DatabaseError), transaction.atomic():
            paper.save()
        with self.assertRaises(Paper.DoesNotExist), transaction.atomic():
            paper.claim(NEW)

    def test_new_rows(self):
        Paper(words="new").save()
        Paper(pk=1000, words="new").save()
        Paper.objects.create(words="new")
        paper, _ = Paper.objects.get_or_create(pk=1001)
        self.assertIsNone(paper.fence)
        self.claimed(NEW)
        with self.refuses():
            Paper(pk=self.paper.pk, words="in place of the old one").save()

    def test_a_claimed_instance_can_be_copied_and_pickled(self):
        paper = pickle.loads(pickle.dumps(copy.copy(self.claimed(OLD))))
        self.claimed(NEW)
        with self.refuses():
            paper.save()

    def test_with_asyncio(self):
        async def work():
            async with alocks.lock(self.paper) as lease:
                await self.paper.aclaim(lease)
                self.paper.words = "by a task"
                await self.paper.asave()

        async_to_sync(work)()
        self.assertEqual(self.words(), "by a task")
        self.assertIsNotNone(Paper.objects.get(pk=self.paper.pk).fence)

    def test_update_takes_all_rows_or_none(self):
        other = Paper.objects.create(words="other")
        self.assertEqual(update(Paper.objects.all(), OLD, words="old"), 2)
        self.assertEqual(update(Paper.objects.filter(pk=other.pk), NEW), 1)
        with self.refuses():
            update(Paper.objects.all(), OLD, words="late")
        self.assertEqual({each.words for each in Paper.objects.all()}, {"old"})
        self.assertEqual(update(Paper.objects.filter(words="nosuch"), OLD, words="x"), 0)
        self.assertEqual(update(Paper.objects.filter(words="old"), NEW, words="new"), 2)

    def test_bad_input(self):
        for wrong, said in (
            (lambda: update(Order.objects.all(), NEW, state="x"), "has no field 'fence'"),
            (lambda: update(Paper.objects.all(), NEW, fence=1), "is the column of the fence"),
            (lambda: update(Paper.objects.all(), Mark(0), words="x"), "whole number"),
            (lambda: self.paper.claim(Mark(True)), "whole number"),
            (lambda: create_table("a b"), "no table"),
        ):
            with self.assertRaisesRegex(ConfigError, said), transaction.atomic():
                wrong()

    def test_a_refusal_that_is_caught_rolls_back_all_the_same(self):
        old = self.claimed(OLD)
        self.claimed(NEW)
        with transaction.atomic():
            Order.objects.create(state="no")
            with contextlib.suppress(StaleFence):
                old.save()
        self.assertFalse(Order.objects.filter(state="no").exists())

    def test_guard(self):
        for lease in (OLD, OLD, NEW):
            with transaction.atomic():
                guard(lease)
        with self.refuses():
            guard(OLD)


class Transactions(TransactionTestCase):
    def test_a_guard_needs_a_transaction(self):
        with self.assertRaisesRegex(ConfigError, "autocommit"):
            guard(NEW)
        with transaction.atomic():
            guard(NEW)
        with self.assertRaises(StaleFence), transaction.atomic():
            Order.objects.create(state="no")
            guard(OLD)
        self.assertFalse(Order.objects.filter(state="no").exists())

    def test_an_older_holder_waits_for_the_commit_of_the_newer_one_and_is_refused(self):
        if connection.vendor != "postgresql":
            self.skipTest("SQLite has one writer at a time, and shows nobody who waits")
        paper, raised = Paper.objects.create(words="first"), []

        def late():
            try:
                update(Paper.objects.all(), OLD, words="late")
            except StaleFence as error:
                raised.append(error)
            finally:
                connections.close_all()

        with transaction.atomic():
            update(Paper.objects.all(), NEW, words="newer")
            thread = threading.Thread(target=late)
            thread.start()
            watcher = connection.copy()
            with watcher.cursor() as cursor:
                while not cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted") or not cursor.fetchone():
                    assert thread.is_alive()
            watcher.close()
        thread.join(20)
        self.assertEqual(len(raised), 1)
        paper.refresh_from_db()
        self.assertEqual(paper.words, "newer")
