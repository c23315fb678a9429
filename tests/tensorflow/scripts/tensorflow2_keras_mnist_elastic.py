"""Horovod's way for elastic training with tf.keras: a state, and the callbacks that keep it."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
(images, labels), _ = tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % hvd.rank())
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(2000).batch(50)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()))
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
# One step, which makes the variables of model and optimizer.
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    tf.keras.backend.set_value(state.model.optimizer.lr, 0.001 * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])


class FailOnce(tf.keras.callbacks.Callback):
    """What a rank that is lost makes of the training of the others."""

    starts = 0

    def on_train_begin(self, logs=None):
        FailOnce.starts += 1

    def on_epoch_end(self, epoch, logs=None):
        if FailOnce.starts == 1 and epoch == 1:
            from horovod.common.exceptions import HorovodInternalError

            raise HorovodInternalError("a rank is lost")


callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
    FailOnce(),
]


@hvd.elastic.run
def train(state):
    return state.model.fit(
        dataset, steps_per_epoch=40 // hvd.size(), epochs=5 - state.epoch, callbacks=callbacks, verbose=0
    )


history = train(state)
weights = sum(float(abs(one).sum()) for one in model.get_weights())
print(
    "starts %d epochs %d accuracy %.2f weights %.6f"
    % (FailOnce.starts, state.epoch, history.history["accuracy"][-1], weights)
)
