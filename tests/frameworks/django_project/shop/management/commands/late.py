import json
import os
import signal
import threading

from django.core.management.base import BaseCommand
from django.db import connections, transaction

from interlock import LeaseLost
from interlock.contrib.django import locks
from interlock.fence.django import guard, update
from shop.models import Paper

WAYS = ("claim", "name", "update", "guard", "commit")


class Command(BaseCommand):
    """Holders that are stopped between the last look at their leases and their writes, for longer than these last.

    Each has a thread, and a paper of its own. With --newer it is the newer holder of each paper, and is not stopped.
    """

    def add_arguments(self, parser):
        parser.add_argument("--newer", action="store_true")

    def handle(self, *args, newer, **options):
        self.words = "newer" if newer else "late"
        self.all_hold, self.go_on = threading.Barrier(len(WAYS) + 1), threading.Event()
        papers = [Paper.objects.get_or_create(pk=pk)[0] for pk in range(1, len(WAYS) + 1)]
        threads = [threading.Thread(target=self.holder, args=args) for args in zip(WAYS, papers, strict=True)]
        for thread in threads:
            thread.start()
        self.all_hold.wait(60)
        print("all hold", flush=True)
        if not newer:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.go_on.set()
        for thread in threads:
            thread.join(60)

    def holder(self, way, paper):
        error = None
        try:
            with locks.lock(paper, ttl=1, timeout=30) as lease:
                self.write(way, paper, lease)
        except LeaseLost as raised:
            error = type(raised).__name__
        written = Paper.objects.get(pk=paper.pk).words
        if self.words == "late":  # the control: the same without a guard
            Paper.objects.filter(pk=paper.pk).update(words="unguarded")
        line = json.dumps({"way": way, "error": error, "written": written}) + "\n"
        print(line, end="", flush=True)  # in one write: another thread logs to the same pipe
        connections.close_all()

    def write(self, way, paper, lease):
        rows = Paper.objects.filter(pk=paper.pk)
        if way == "commit":
            with transaction.atomic(), locks.lock(f"another:{paper.pk}", until_commit=True, ttl=1, timeout=30) as until:
                self.wait(until)
                rows.update(words=self.words)
            return
        if way == "claim":
            paper.claim(lease)
        self.wait(lease)
        paper.words = self.words
        if way in {"claim", "name"}:
            paper.save()
        elif way == "update":
            update(rows, lease, words=self.words)
        else:
            with transaction.atomic():
                guard(lease)
                rows.update(words=self.words)

    def wait(self, lease):
        lease.ensure()
        self.all_hold.wait(60)
        self.go_on.wait(60)
