"""Horovod's way for TensorFlow 1: a monitored session with the hook that broadcasts, and a wrapped optimizer."""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow import keras

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.INFO)
parser = argparse.ArgumentParser()
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=160)
args = parser.parse_args()


def network(images, labels):
    """The loss and the predicted digits of two convolutions and two dense layers."""
    with tf.variable_scope("convolutions"):
        x = tf.reshape(images, [-1, 28, 28, 1])
        for filters in (8, 16):
            x = tf.layers.conv2d(x, filters, kernel_size=[5, 5], padding="SAME", activation=tf.nn.relu)
            x = tf.nn.max_pool(x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    x = tf.layers.dropout(tf.layers.dense(tf.layers.flatten(x), 64, activation=tf.nn.relu), rate=0.2, training=True)
    logits = tf.layers.dense(x, 10)
    return tf.losses.sparse_softmax_cross_entropy(tf.cast(labels, tf.int32), logits), tf.argmax(logits, 1)


def batches(images, labels, size):
    """Batches without end, each pass in another order."""
    while True:
        order = np.random.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows], labels[rows]


def main(_):
    hvd.init()
    (x_train, y_train), _ = keras.datasets.mnist.load_data("MNIST-data-%d" % hvd.rank())
    x_train = np.reshape(x_train, (-1, 784)) / 255.0

    image = tf.placeholder(tf.float32, [None, 784], name="image")
    label = tf.placeholder(tf.float32, [None], name="label")
    loss, predicted = network(image, label)
    right = tf.reduce_mean(tf.cast(tf.equal(predicted, tf.cast(label, tf.int64)), tf.float32))

    scale = 1 if args.use_adasum else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        tf.train.AdamOptimizer(0.001 * scale),
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    global_step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=global_step)
    with tf.control_dependencies([train_op]):
        total = tf.add_n([tf.reduce_sum(tf.abs(variable.read_value())) for variable in tf.trainable_variables()])

    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=args.steps // hvd.size()),
        tf.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=20),
    ]
    config = tf.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    # Only rank 0 keeps checkpoints.
    folder = "./checkpoints" if hvd.rank() == 0 else None
    source = batches(x_train, y_train, size=50)
    accuracies = []
    with tf.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks, config=config) as session:
        while not session.should_stop():
            x, y = next(source)
            _, accuracy, weights = session.run([train_op, right, total], feed_dict={image: x, label: y})
            accuracies.append(accuracy)
    print("accuracy %.2f weights %.6f" % (np.mean(accuracies[-10:]), weights))


if __name__ == "__main__":
    tf.app.run()
