import uuid

from django.db import models

from interlock.fence.django import FencedModel


class Order(models.Model):
    state = models.CharField(max_length=20, default="new")
    stock = models.IntegerField(default=0)


class Rush(Order):
    class Meta:
        proxy = True


class Gift(Order):
    card = models.TextField(default="")


class Parcel(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)


class Letter(models.Model):
    address = models.CharField(max_length=200, primary_key=True)


class Paper(FencedModel):
    words = models.TextField(default="")


class Note(models.Model):
    """What a view wrote under a lock, one after another."""

    worker = models.IntegerField()
    order = models.ForeignKey(Order, models.CASCADE)
