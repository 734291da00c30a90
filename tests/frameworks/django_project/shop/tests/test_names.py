"""Names of model instances."""

import uuid

from django.test import TestCase

from interlock import ConfigError
from interlock.contrib.django import alocks, locks, name_of
from shop.models import Gift, Letter, Order, Parcel, Rush


class Names(TestCase):
    def test_an_instance_is_its_app_model_and_key(self):
        order = Order.objects.create()
        self.assertEqual(name_of(order), f"shop.order:{order.pk}")
        self.assertEqual(locks.lock(order).name, f"shop.order:{order.pk}")
        self.assertEqual(locks.lock(order, until_commit=True).name, f"shop.order:{order.pk}")
        for kind in (locks.rlock, locks.rwlock, alocks.lock, alocks.rlock, alocks.rwlock):
            self.assertEqual(kind(order).name, f"shop.order:{order.pk}")
        for kind in (locks.semaphore, alocks.semaphore):
            self.assertEqual(kind(order, 3).name, f"shop.order:{order.pk}")
        self.assertEqual(name_of(Order(pk=7)), "shop.order:7")
        self.assertEqual(name_of(Order.objects.only("state").get(pk=order.pk)), f"shop.order:{order.pk}")

    def test_a_proxy_is_its_concrete_model_and_a_child_is_a_model_of_its_own(self):
        rush, gift = Rush.objects.create(), Gift.objects.create()
        self.assertEqual(name_of(rush), f"shop.order:{rush.pk}")
        self.assertEqual(name_of(gift), f"shop.gift:{gift.pk}")

    def test_a_key_may_be_any_text(self):
        key = uuid.uuid4()
        self.assertEqual(name_of(Parcel.objects.create(pk=key)), f"shop.parcel:{key}")
        names = {name_of(Letter(address=each)) for each in ("a b", "a{b", "a\nb", "é", "x" * 199, "%7B")}
        self.assertEqual(len(names), 6)
        for each in names:
            with locks.lock(each):
                pass

    def test_an_instance_that_was_not_saved_has_no_name(self):
        for unsaved in (Order(), Parcel()):
            with self.assertRaisesRegex(ConfigError, "was not saved.*Save it first"):
                locks.lock(unsaved)

    def test_other_things_have_no_name(self):
        for wrong, said in ((Order, "Give one Order"), (7, "saved model instance"), (None, "saved model instance")):
            with self.assertRaisesRegex(ConfigError, said):
                locks.lock(wrong)
        with self.assertRaisesRegex(ConfigError, "until_commit=True"):
            locks.lock("a", using="default")
